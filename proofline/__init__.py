"""The package for other programs. Its client is `proofline.client`."""
