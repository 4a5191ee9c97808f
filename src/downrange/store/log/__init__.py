"""The commit log: fixed-size files that hold every record in the order of arrival."""
