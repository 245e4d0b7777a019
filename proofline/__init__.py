"""What other programs import: `proofline.client`."""
