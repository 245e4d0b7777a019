"""The command `proofline` and the supervisor behind `proofline up`."""
