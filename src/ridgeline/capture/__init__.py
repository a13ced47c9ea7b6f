"""Capturing: functions as flat programs, and what CUDA graphs can hold."""
