# How the library and the extension are hardened: what of them goes wrong in another's process is to
# end there, not to go on. docs/linking.md says what that costs.

include(CheckCXXCompilerFlag)
include(CheckCXXSourceCompiles)

# Canaries behind arrays; a stack that grows page by page and so meets its guard page; marks where
# indirect calls may lead, for which x86-64 and aarch64 have a flag each. Compilers know some of them; of
# one for another processor Clang merely warns.
set(flashmoe_hardening "")
set(CMAKE_REQUIRED_FLAGS -Werror)
foreach(flag -fstack-protector-strong -fstack-clash-protection -fcf-protection=full
    -mbranch-protection=standard)
  string(MAKE_C_IDENTIFIER "flashmoe_compiler_has${flag}" has)
  check_cxx_compiler_flag("${flag}" ${has})
  if(${has})
    list(APPEND flashmoe_hardening "${flag}")
  endif()
endforeach()
unset(CMAKE_REQUIRED_FLAGS)

# The C library's checked functions: compilers that optimise alone can check, and sanitizers look at
# the plain functions. Where level 3 is not known glibc would warn of it.
set(flashmoe_fortified "")
if(NOT FLASHMOE_SANITIZE)
  set(CMAKE_REQUIRED_FLAGS "-O2 -U_FORTIFY_SOURCE -D_FORTIFY_SOURCE=3")
  check_cxx_source_compiles("#include <cstdio>
#if __USE_FORTIFY_LEVEL < 3
#error
#endif
int main() {}" flashmoe_compiler_fortifies_3)
  unset(CMAKE_REQUIRED_FLAGS)
  set(flashmoe_fortified
    -U_FORTIFY_SOURCE -D_FORTIFY_SOURCE=$<IF:$<BOOL:${flashmoe_compiler_fortifies_3}>,3,2>)
endif()

# The host code in CUDA's sources, too, but for the checked functions: nvcc reads their declarations
# for the device as well.
function(flashmoe_harden target)
  if(NOT FLASHMOE_HARDEN)
    return()
  endif()
  target_compile_options(${target} PRIVATE
    "$<$<COMPILE_LANGUAGE:CXX>:${flashmoe_hardening}>"
    "$<$<AND:$<COMPILE_LANGUAGE:CXX>,$<CONFIG:Release,RelWithDebInfo,MinSizeRel>>:${flashmoe_fortified}>")
  foreach(flag IN LISTS flashmoe_hardening)
    target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=${flag}>")
  endforeach()
  # What was relocated is read-only before the first call, and no stack is executable.
  target_link_options(${target} PRIVATE LINKER:-z,relro LINKER:-z,now LINKER:-z,noexecstack)
endfunction()
