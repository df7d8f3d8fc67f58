"""Descriptions of machines, against the figures of data sheets and sums made by hand."""
