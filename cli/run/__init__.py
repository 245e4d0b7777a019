"""The commands that run one of Proofline's processes, and commands for its keys and its health."""
