# How every object of libflashmoe is compiled.

if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "" FORCE)
endif()

set(FLASHMOE_WARNINGS -Wall -Wextra -Wconversion -Wshadow)
if(FLASHMOE_WERROR)
  list(APPEND FLASHMOE_WARNINGS -Werror)
endif()

function(flashmoe_compile target)
  set_target_properties(${target} PROPERTIES
    POSITION_INDEPENDENT_CODE ON
    CXX_STANDARD 17 CXX_STANDARD_REQUIRED ON CXX_EXTENSIONS OFF
    CUDA_STANDARD 17 CUDA_STANDARD_REQUIRED ON
    CXX_VISIBILITY_PRESET hidden CUDA_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON)
  target_include_directories(${target} PRIVATE "${PROJECT_SOURCE_DIR}" "${PROJECT_SOURCE_DIR}/include")
  target_compile_definitions(${target} PRIVATE
    FLASHMOE_BUILDING FLASHMOE_WITH_CUDA=$<BOOL:${FLASHMOE_CUDA}>
    FLASHMOE_WITH_SM90=$<BOOL:${FLASHMOE_SM90}>)
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:${FLASHMOE_WARNINGS}>)
  if(FLASHMOE_SANITIZE)
    target_compile_options(${target} PRIVATE
      $<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${FLASHMOE_SANITIZE} -fno-omit-frame-pointer
        -fno-sanitize-recover=all>)
  endif()
endfunction()
