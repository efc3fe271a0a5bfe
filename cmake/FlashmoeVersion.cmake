# FLASHMOE_VERSION from the public header, the one place that states it.

file(STRINGS "${CMAKE_CURRENT_LIST_DIR}/../include/flashmoe/flashmoe.h" flashmoe_version_lines
  REGEX "^#define FLASHMOE_VERSION_(MAJOR|MINOR|PATCH) [0-9]+$")
list(TRANSFORM flashmoe_version_lines REPLACE ".* " "")
list(JOIN flashmoe_version_lines "." FLASHMOE_VERSION)
if(NOT FLASHMOE_VERSION MATCHES "^[0-9]+\\.[0-9]+\\.[0-9]+$")
  message(FATAL_ERROR "flashmoe.h: no FLASHMOE_VERSION_MAJOR, _MINOR, _PATCH lines")
endif()
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS
  "${CMAKE_CURRENT_LIST_DIR}/../include/flashmoe/flashmoe.h")
