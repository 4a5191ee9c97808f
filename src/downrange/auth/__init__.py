"""Access control: pure rules about accounts, signatures and permissions, used by every server and both protocols."""
