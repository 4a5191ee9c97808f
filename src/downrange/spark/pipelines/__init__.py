"""What people do with topics in bulk: archive them, replay an archive, ask SQL, count and draw. Each is a function."""
