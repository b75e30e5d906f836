"""What people see and type: reports, logs, hints, prompts; and what must be settled before torch is loaded."""
