"""The whole system in one process and without time: real cores, everything around them imagined.

``joint`` joins the parts into one world; ``chaos`` drives it at random, ``explore`` through every order.
"""
