// What the two compilations of hpp.cpp share.
#pragma once

void hpp_checks_with_exceptions();
void hpp_checks_without_exceptions();

// How often operator new has been called so far, by whichever part of the program.
long hpp_allocations();
