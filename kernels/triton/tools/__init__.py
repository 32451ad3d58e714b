"""What measures kernels and looks into them: times, tuning, machine code."""
