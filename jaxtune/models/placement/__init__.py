"""Where arrays are. partition.py divides tensors and the rows of a batch over the devices of a mesh; gathers.py makes
divided tensors whole before they are used (gathers) and divides their gradients (scatters), and low_format.py does so
with numbers of few bits. While a layer computes, collectives.py schedules these exchanges, and transfers.py schedules
copies to and from host memory. host_table.py is about the one table that a run can have in host memory."""
