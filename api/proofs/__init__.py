"""Jobs and rounds: admitted, stored, published, waited for."""
