"""The command line: the command `proofline`, and the supervisor of `proofline up`."""
