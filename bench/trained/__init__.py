"""Proofs and chats of a trained model, by honest machines and by cheats."""
