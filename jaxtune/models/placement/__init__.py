"""Where arrays are. partition.py divides tensors and the rows of a batch over the devices of a mesh; gathers.py makes
divided tensors whole before they are used (gathers), and sums and divides their gradients (scatters); low_format.py
sums gradients over devices in numbers of few bits. While a layer computes, collectives.py schedules gathers and
scatters, and transfers.py copies to and from host memory. host_table.py is about the weights that a run can have in
host memory: tables of embeddings, of which a program gets the rows of its tokens. transposed_codes.py adds a copy of
frozen FP8 weights' codes to what a program gets."""
