"""Hundreds of workers on one Redis: what each costs, and what a thousand would."""
