"""The web console: an operator reads what is wrong in words, and sees what each step will do before it is done."""
