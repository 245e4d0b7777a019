"""The commands `doctor` and `config`, with a module for each subject to check."""
