"""What a study found, told to people: summary, report, notes, dashboard, launch files."""
