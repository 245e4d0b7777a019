"""Starting and configuring a vLLM engine and its processes, on one host or on several."""
