"""What runs without the interpreter: the library of csrc/host, loaded when something of it is first used."""
