"""Workers that train alone and exchange parameters every few steps."""
