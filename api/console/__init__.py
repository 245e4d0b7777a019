"""The console at /console: the data that its page shows, and the page's files."""
