# The shared and the static library, made of the same objects.

set(FLASHMOE_OBJECTS $<TARGET_OBJECTS:flashmoe_objects>)
if(FLASHMOE_CUDA)
  list(APPEND FLASHMOE_OBJECTS $<TARGET_OBJECTS:flashmoe_cuda>)
endif()

find_package(Threads REQUIRED)

add_library(flashmoe SHARED ${FLASHMOE_OBJECTS})
target_link_libraries(flashmoe PRIVATE Threads::Threads ${CMAKE_DL_LIBS})
target_link_options(flashmoe PRIVATE -Wl,--exclude-libs,ALL -Wl,--no-undefined
  $<$<BOOL:${FLASHMOE_SANITIZE}>:-fsanitize=${FLASHMOE_SANITIZE}>)
set_target_properties(flashmoe PROPERTIES SOVERSION ${FLASHMOE_ABI} LINKER_LANGUAGE CXX)
target_include_directories(flashmoe INTERFACE
  $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include> $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
add_library(flashmoe::flashmoe ALIAS flashmoe)
