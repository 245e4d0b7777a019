"""`doctor` and `config`: a module for each thing of this machine and its settings to check."""
