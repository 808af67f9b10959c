// The main function of each test binary.

#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest.h>

#include <iostream>

int main(int argc, char** argv) {
    std::cout << std::unitbuf;  // a process that ends at once has said why
    return doctest::Context(argc, argv).run();
}
