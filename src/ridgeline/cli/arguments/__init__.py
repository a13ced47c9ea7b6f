"""Arguments that several verbs share, and the files and directories that they name."""
