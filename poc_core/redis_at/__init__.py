"""Where Redis is: its url, and the connections that are made from one."""
