# -DFLASHMOE_MANYLINUX=ON: a build on a new distribution that runs on old ones, back to those with
# glibc 2.28 and GCC 8's libstdc++ (manylinux_2_28).
#
# glibc gave functions new versions in 2.29 and 2.34 and kept the old ones beside them. A linker takes
# the new version, which an old distribution does not have: here it is to take the old one, which all
# have.

if(NOT (CMAKE_SYSTEM_NAME STREQUAL "Linux" AND CMAKE_SYSTEM_PROCESSOR STREQUAL "x86_64"))
  message(FATAL_ERROR "FLASHMOE_MANYLINUX: got ${CMAKE_SYSTEM_NAME} on ${CMAKE_SYSTEM_PROCESSOR}, "
    "accepted is Linux on x86_64")
endif()

# libm: the assembler is told.
add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:SHELL:-include \"${CMAKE_CURRENT_LIST_DIR}/manylinux_libm.h\">")

# libstdc++: what an old one lacks is a source of what is linked.
set(FLASHMOE_MANYLINUX_SOURCES "${CMAKE_CURRENT_LIST_DIR}/manylinux_libstdcxx.cpp")

# libpthread, libdl and librt: since 2.34 these functions are in libc, and the files are empty. Linked
# is a library that has an old one's name and functions. Most are what CUDA's runtime calls, which
# comes compiled, so that its assembler cannot be told.
set(flashmoe_manylinux_functions
  "libdl.so.2 GLIBC_2.2.5 dlclose dlerror dlopen dlsym dlvsym"
  "libdl.so.2 GLIBC_2.3.4 dlmopen"
  "libpthread.so.0 GLIBC_2.2.5 \
pthread_condattr_setpshared pthread_create pthread_detach pthread_getspecific pthread_join \
pthread_key_create pthread_key_delete pthread_kill pthread_mutex_trylock \
pthread_mutexattr_destroy pthread_mutexattr_init pthread_mutexattr_setpshared \
pthread_mutexattr_settype pthread_once pthread_rwlock_destroy pthread_rwlock_init \
pthread_rwlock_rdlock pthread_rwlock_timedrdlock pthread_rwlock_timedwrlock \
pthread_rwlock_tryrdlock pthread_rwlock_trywrlock pthread_rwlock_unlock pthread_rwlock_wrlock \
pthread_rwlockattr_destroy pthread_rwlockattr_init pthread_rwlockattr_setpshared \
pthread_setspecific pthread_spin_destroy pthread_spin_init pthread_spin_lock \
pthread_spin_trylock pthread_spin_unlock \
sem_destroy sem_init sem_post sem_timedwait sem_trywait sem_wait"
  "libpthread.so.0 GLIBC_2.3.4 pthread_setaffinity_np"
  "librt.so.1 GLIBC_2.2.5 shm_open shm_unlink")

foreach(library libdl.so.2 libpthread.so.0 librt.so.1)
  set(source "")
  set(versions "")
  foreach(line IN LISTS flashmoe_manylinux_functions)
    string(REPLACE " " ";" functions "${line}")
    list(POP_FRONT functions of version)
    if(of STREQUAL library)
      list(TRANSFORM functions REPLACE "(.+)" "void \\1(void) {}\n" OUTPUT_VARIABLE definitions)
      string(APPEND source ${definitions})
      list(JOIN functions "; " functions)
      string(APPEND versions "${version} { ${functions}; };\n")
    endif()
  endforeach()
  set(stub "${PROJECT_BINARY_DIR}/manylinux/${library}")
  file(WRITE "${stub}.c" "${source}")
  file(WRITE "${stub}.map" "${versions}")
  execute_process(
    COMMAND "${CMAKE_C_COMPILER}" -shared -fPIC -nostdlib "${stub}.c" -o "${stub}"
      -Wl,-soname,${library} "-Wl,--version-script,${stub}.map"
    COMMAND_ERROR_IS_FATAL ANY)
  # Behind all else that is linked, but for libc itself.
  string(APPEND CMAKE_CXX_STANDARD_LIBRARIES
    " -Wl,--push-state,--as-needed \"${stub}\" -Wl,--pop-state")
endforeach()
