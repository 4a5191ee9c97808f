"""The broker: takes messages, keeps them, hands them out, and looks after producers and consumers."""
