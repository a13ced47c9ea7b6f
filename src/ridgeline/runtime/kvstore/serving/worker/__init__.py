"""The workers' side: connections, and values that servers hold."""
