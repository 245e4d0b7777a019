"""How a new host joins a node with one token: what it proves, and what it is given."""
