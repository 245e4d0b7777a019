"""Proofline as a library for other programs. The client is `proofline.client`."""
