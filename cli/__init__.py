"""The command line of Proofline: the command `proofline`, and the supervisor of the processes that
`proofline up` starts.
"""
