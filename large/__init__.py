"""Models, batches and machines that outgrow one device. Imported where a run asks for it."""
