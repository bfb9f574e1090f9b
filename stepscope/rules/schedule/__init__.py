"""Learning-rate schedules: SCH."""
