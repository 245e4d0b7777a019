"""For other programs: `proofline.client`."""
