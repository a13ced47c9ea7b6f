"""Values where they lie: in one process, or divided among workers."""
