"""The console at /console: the data that its pages show, the stream to them, and their files."""
