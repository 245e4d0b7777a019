"""Jobs and rounds: admission, storage, wake-up of workers, waiting for results."""
