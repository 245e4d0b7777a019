"""The commands `doctor` and `config`, and one module for each subject that `doctor` checks."""
