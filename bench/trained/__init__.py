"""What proofs and chats tell of a model that was trained."""
