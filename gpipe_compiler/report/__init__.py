"""Shows plans to people."""
