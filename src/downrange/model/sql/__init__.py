"""SQL92 expressions over message properties: text -> tree -> functions. Pure: no files, sockets, clocks or logging."""
