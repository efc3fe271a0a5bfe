# The shared and the static library, made of the same objects, and their installation: headers,
# CMake package, pkg-config files.
#
# A wheel cannot hold symbolic links (they become copies), so under scikit-build-core there is one
# file, libflashmoe.so.<abi>, and no static library. A system install has the usual links.

find_package(Threads REQUIRED)
include(CMakePackageConfigHelpers)

set(flashmoe_objects $<TARGET_OBJECTS:flashmoe_objects>)
if(FLASHMOE_CUDA)
  list(APPEND flashmoe_objects $<TARGET_OBJECTS:flashmoe_cuda> $<TARGET_OBJECTS:flashmoe_cuda_large>)
  if(FLASHMOE_SM90)
    list(APPEND flashmoe_objects $<TARGET_OBJECTS:flashmoe_cuda_sm90>)
  endif()
endif()

# ---- targets --------------------------------------------------------------------------------

add_library(flashmoe SHARED ${flashmoe_objects} ${FLASHMOE_MANYLINUX_SOURCES})
set(flashmoe_targets flashmoe)
set_target_properties(flashmoe PROPERTIES
  SOVERSION ${FLASHMOE_ABI} LINKER_LANGUAGE CXX
  LINK_DEPENDS "${CMAKE_CURRENT_LIST_DIR}/flashmoe.map")
if(NOT SKBUILD)
  set_target_properties(flashmoe PROPERTIES VERSION ${PROJECT_VERSION})
endif()
target_link_libraries(flashmoe PRIVATE Threads::Threads ${CMAKE_DL_LIBS})
# The map hides what -fvisibility=hidden cannot: templates of namespace std are always visible.
target_link_options(flashmoe PRIVATE
  "LINKER:--version-script=${CMAKE_CURRENT_LIST_DIR}/flashmoe.map"
  LINKER:--exclude-libs,ALL LINKER:--as-needed
  LINKER:-z,nodelete  # the CPU backend's threads sleep in this code
  $<$<CONFIG:Release>:LINKER:--strip-all>)
flashmoe_harden(flashmoe)
if(FLASHMOE_SANITIZE)
  target_link_options(flashmoe PUBLIC -fsanitize=${FLASHMOE_SANITIZE})
else()
  target_link_options(flashmoe PRIVATE LINKER:--no-undefined)
endif()

if(FLASHMOE_STATIC AND NOT SKBUILD)
  add_library(flashmoe_static STATIC ${flashmoe_objects})
  list(APPEND flashmoe_targets flashmoe_static)
  set_target_properties(flashmoe_static PROPERTIES OUTPUT_NAME flashmoe LINKER_LANGUAGE CXX)
  # By name, since a C project that links this library may not have enabled C++.
  target_link_libraries(flashmoe_static INTERFACE stdc++ m Threads::Threads ${CMAKE_DL_LIBS})
endif()

foreach(target IN LISTS flashmoe_targets)
  add_library(flashmoe::${target} ALIAS ${target})
  target_include_directories(${target} INTERFACE
    $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>
    $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
endforeach()

# ---- installation ---------------------------------------------------------------------------

if(SKBUILD)
  set(flashmoe_libdir lib)
  set(flashmoe_includedir include)
  set(flashmoe_namelink NAMELINK_SKIP)
  set(FLASHMOE_PC_LIBS "-L\${libdir} -l:libflashmoe.so.${FLASHMOE_ABI} -Wl,-rpath,\${libdir}")
else()
  set(flashmoe_libdir "${CMAKE_INSTALL_LIBDIR}")
  set(flashmoe_includedir "${CMAKE_INSTALL_INCLUDEDIR}")
  set(flashmoe_namelink)
  set(FLASHMOE_PC_LIBS "-L\${libdir} -lflashmoe")
endif()
set(flashmoe_cmakedir "${flashmoe_libdir}/cmake/flashmoe")

install(DIRECTORY "${PROJECT_SOURCE_DIR}/include/flashmoe" DESTINATION "${flashmoe_includedir}"
  FILES_MATCHING PATTERN "*.h" PATTERN "*.hpp")
install(TARGETS flashmoe EXPORT flashmoe-targets
  LIBRARY DESTINATION "${flashmoe_libdir}" ${flashmoe_namelink})
install(EXPORT flashmoe-targets NAMESPACE flashmoe:: DESTINATION "${flashmoe_cmakedir}")
if(TARGET flashmoe_static)
  install(TARGETS flashmoe_static EXPORT flashmoe-static-targets
    ARCHIVE DESTINATION "${flashmoe_libdir}")
  install(EXPORT flashmoe-static-targets NAMESPACE flashmoe:: DESTINATION "${flashmoe_cmakedir}")
endif()

configure_package_config_file("${CMAKE_CURRENT_LIST_DIR}/flashmoe-config.cmake.in"
  "${PROJECT_BINARY_DIR}/flashmoe-config.cmake"
  INSTALL_DESTINATION "${flashmoe_cmakedir}" NO_CHECK_REQUIRED_COMPONENTS_MACRO)
# While the major version is 0, a minor release may break its callers.
write_basic_package_version_file("${PROJECT_BINARY_DIR}/flashmoe-config-version.cmake"
  COMPATIBILITY SameMinorVersion)
install(FILES
  "${PROJECT_BINARY_DIR}/flashmoe-config.cmake"
  "${PROJECT_BINARY_DIR}/flashmoe-config-version.cmake"
  DESTINATION "${flashmoe_cmakedir}")

# From lib/pkgconfig back to the prefix, so that the installed tree can be moved.
file(RELATIVE_PATH FLASHMOE_PC_PREFIX "/prefix/${flashmoe_libdir}/pkgconfig" "/prefix")
string(REGEX REPLACE "/$" "" FLASHMOE_PC_PREFIX "${FLASHMOE_PC_PREFIX}")
set(FLASHMOE_PC_LIBDIR "${flashmoe_libdir}")
set(FLASHMOE_PC_INCLUDEDIR "${flashmoe_includedir}")
# What an archive leaves to its user. The CUDA runtime is looked for in `cudadir`, which a user may
# set: pkg-config --define-variable=cudadir=/opt/cuda.
set(FLASHMOE_PC_LIBS_PRIVATE "-lstdc++ -lm -lpthread -ldl")
if(FLASHMOE_CUDA)
  string(PREPEND FLASHMOE_PC_LIBS_PRIVATE
    "-L\${cudadir}/lib64 -L\${cudadir}/lib -lcudart_static -lrt ")
endif()
set(flashmoe_pc_files flashmoe)
if(TARGET flashmoe_static)
  list(APPEND flashmoe_pc_files flashmoe-static)
endif()
foreach(name IN LISTS flashmoe_pc_files)
  configure_file("${CMAKE_CURRENT_LIST_DIR}/${name}.pc.in" "${PROJECT_BINARY_DIR}/${name}.pc" @ONLY)
  install(FILES "${PROJECT_BINARY_DIR}/${name}.pc" DESTINATION "${flashmoe_libdir}/pkgconfig")
endforeach()
