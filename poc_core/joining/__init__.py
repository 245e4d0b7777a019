"""How a new host joins a node with one token: invitations, tokens and offers."""
