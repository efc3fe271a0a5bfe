# Renders the explicit instantiations of kernels into the build folder, so that they compile in
# parallel and a kernel is found by its name. Kernels share files, as many as compile in about 25 s:
# what each would include costs the compiler as much as a kernel of sm90. Those of a file that have the same
# prologue, or the same kernel behind them, share that, so they lie side by side. Beside others the compiler
# makes other code of sm90's for ragged batches: compare it where files change.

# Kernels of the attention families: head dimension of q and k, of v, and optionally a tuning other
# than the table's with its suffix. Other head dimensions are padded to the next.
set(FLASHMOE_ATTENTION_SM89_KERNELS
  "32,32" "64,64" "96,96" "128,128" "128,128,EightWarpTuning,_w8" "192,128" "192,192" "256,256"
  "64,64,RaggedTuning,_ragged" "128,128,RaggedTuning,_ragged" "192,128,RaggedTuning,_ragged"
  "256,256,RaggedTuning,_ragged"
  "64,64,BiasedTuning,_biased" "128,128,BiasedTuning,_biased" "256,256,BiasedTuning,_biased"
  "64,64,RaggedBiasedTuning,_ragged_biased" "128,128,RaggedBiasedTuning,_ragged_biased"
  "256,256,RaggedBiasedTuning,_ragged_biased")
# Of these the third is the number of query rows of a tile.
set(FLASHMOE_ATTENTION_SM89_FEW_ROWS_KERNELS
  "64,64,8,_r8" "64,64,16,_r16" "64,64,32,_r32" "256,256,8,_r8"
  "128,128,8,_r8" "128,128,16,_r16" "192,128,8,_r8" "192,128,16,_r16")
# And the fifth whether keys and values are of fp8.
set(FLASHMOE_ATTENTION_SM89_DECODE_KERNELS
  "64,64,8,_r8" "64,64,16,_r16" "128,128,8,_r8" "128,128,16,_r16" "192,128,16,_r16" "256,256,8,_r8"
  "64,64,8,_r8_fp8,true" "64,64,16,_r16_fp8,true" "128,128,8,_r8_fp8,true" "128,128,16,_r16_fp8,true"
  "192,128,16,_r16_fp8,true" "256,256,8,_r8_fp8,true")
# Those of split KV are called so. With and without a softcap they share what adds up parts.
set(FLASHMOE_ATTENTION_SM90_KERNELS
  "64,64" "96,96" "128,128" "192,128" "192,192" "256,256"
  "64,64,CappedTuning,_softcap" "96,96,CappedTuning,_softcap" "128,128,CappedTuning,_softcap"
  "192,128,CappedTuning,_softcap" "192,192,CappedTuning,_softcap" "256,256,CappedTuning,_softcap"
  "64,64,SplitTuning," "64,64,CappedSplitTuning,_softcap"
  "128,128,SplitTuning," "128,128,CappedSplitTuning,_softcap"
  "256,256,SplitTuning," "256,256,CappedSplitTuning,_softcap"
  "192,128,SplitTuning," "192,128,CappedSplitTuning,_softcap"
  "64,64,RaggedTuning,_ragged" "128,128,RaggedTuning,_ragged" "192,128,RaggedTuning,_ragged"
  "256,256,RaggedTuning,_ragged"
  "64,64,CappedRaggedTuning,_ragged_softcap" "128,128,CappedRaggedTuning,_ragged_softcap"
  "192,128,CappedRaggedTuning,_ragged_softcap" "256,256,CappedRaggedTuning,_ragged_softcap"
  "64,64,WindowTuning,_window" "64,64,RaggedWindowTuning,_ragged_window"
  "64,64,PackedRaggedTuning,_ragged_packed" "128,128,PackedRaggedTuning,_ragged_packed"
  "256,256,PackedRaggedTuning,_ragged_packed")
# Of keys whose first columns are the values.
set(FLASHMOE_ATTENTION_SM90_MLA_KERNELS "576,512")
# Those for Ada last, so that no file has some of either.
set(FLASHMOE_ATTENTION_SM89_BACKWARD_KERNELS
  "64,64" "128,128" "256,256"
  "64,64,BiasedTuning,_biased" "128,128,BiasedTuning,_biased" "256,256,BiasedTuning,_biased"
  "64,64,AdaTuning,_ada" "128,128,AdaTuning,_ada" "256,256,AdaTuning,_ada"
  "64,64,RaggedAdaTuning,_ragged_ada" "128,128,RaggedAdaTuning,_ragged_ada"
  "256,256,RaggedAdaTuning,_ragged_ada"
  "64,64,BiasedAdaTuning,_biased_ada" "128,128,BiasedAdaTuning,_biased_ada"
  "256,256,BiasedAdaTuning,_biased_ada"
  "64,64,RaggedBiasedAdaTuning,_ragged_biased_ada" "128,128,RaggedBiasedAdaTuning,_ragged_biased_ada"
  "256,256,RaggedBiasedAdaTuning,_ragged_biased_ada")
set(FLASHMOE_ATTENTION_SM90_BACKWARD_KERNELS
  "64,64" "64,64,CappedTuning,_softcap" "128,128" "128,128,CappedTuning,_softcap"
  "192,128" "192,128,CappedTuning,_softcap" "192,192" "192,192,CappedTuning,_softcap"
  "256,256" "256,256,CappedTuning,_softcap"
  "128,128,RaggedTuning,_ragged" "128,128,CappedRaggedTuning,_ragged_softcap"
  "64,64,RaggedTuning,_ragged")

# `template`: what an instance of a family is rendered from.
macro(flashmoe_read_template template source_dir)
  file(READ "${source_dir}/instance.cu.in" ${template})
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${source_dir}/instance.cu.in")
endmacro()

# A file of rendered instances.
function(flashmoe_render target file source)
  file(CONFIGURE OUTPUT "${file}" CONTENT "${source}" @ONLY)
  target_sources(${target} PRIVATE "${file}")
endfunction()

# `per_file`: so many of the list share a file, each in both dtypes. It is called from the first of them on.
# A second target takes the files of kernels that Ada has not the shared memory for, which are those of no
# tuning for Ada.
function(flashmoe_instantiate_attention target family per_file)
  set(source_dir "${PROJECT_SOURCE_DIR}/cuda/attention/${family}")
  set(binary_dir "${PROJECT_BINARY_DIR}/generated/cuda/attention/${family}")
  string(TOUPPER "FLASHMOE_ATTENTION_${family}_KERNELS" kernels)
  flashmoe_read_template(template "${source_dir}")
  set(ENTRIES "")
  list(LENGTH ${kernels} count)
  foreach(first RANGE 0 ${count} ${per_file})
    if(first EQUAL count)
      break()
    endif()
    list(SUBLIST ${kernels} ${first} ${per_file} together)
    set(source "")
    set(names "")
    foreach(kernel IN LISTS together)
      string(REPLACE "," ";" kernel "${kernel}")
      list(LENGTH kernel given)
      set(FP8 false)
      if(given GREATER 4)
        list(GET kernel 4 FP8)
      endif()
      list(APPEND kernel TableTuning "")
      list(GET kernel 0 DIM)
      list(GET kernel 1 DIM_V)
      list(GET kernel 2 TUNING)
      list(GET kernel 3 suffix)
      set(schedule "")
      if(TUNING MATCHES "Split")
        set(schedule "split_kv_")
      endif()
      foreach(dtype fp16 bf16)
        if(dtype STREQUAL "fp16")
          set(ELEMENT __half)
        else()
          set(ELEMENT __nv_bfloat16)
        endif()
        set(NAME "${schedule}${dtype}_d${DIM}_dv${DIM_V}${suffix}")
        string(CONFIGURE "${template}" instance @ONLY)
        string(APPEND source "${instance}")
        list(APPEND names "${NAME}")
        string(APPEND ENTRIES "FLASHMOE_ENTRY(${NAME})\n")
      endforeach()
    endforeach()
    list(GET names 0 name)
    set(owner ${target})
    if(ARGN AND NOT together MATCHES "Ada")
      set(owner ${ARGN})
    endif()
    flashmoe_render(${owner} "${binary_dir}/from_${name}.cu" "${source}")
  endforeach()
  configure_file("${source_dir}/entries.inc.in" "${binary_dir}/entries.inc" @ONLY)
  target_include_directories(${target} PRIVATE "${PROJECT_BINARY_DIR}/generated")
endfunction()

# Experts of a token that one lane of a warp looks at. Other numbers of experts are padded to the next.
set(FLASHMOE_MOE_ROUTE_EXPERTS_PER_LANE 1 4 8 16 32)

function(flashmoe_instantiate_moe_route target)
  set(source_dir "${PROJECT_SOURCE_DIR}/cuda/moe/route")
  set(binary_dir "${PROJECT_BINARY_DIR}/generated/cuda/moe/route")
  flashmoe_read_template(template "${source_dir}")
  set(ENTRIES "")
  set(source "")
  foreach(PER_LANE IN LISTS FLASHMOE_MOE_ROUTE_EXPERTS_PER_LANE)
    math(EXPR experts "32 * ${PER_LANE}")
    foreach(bits 32 64)
      set(KEY "Key${bits}")
      set(NAME "key${bits}_e${experts}")
      string(CONFIGURE "${template}" instance @ONLY)
      string(APPEND source "${instance}")
      string(APPEND ENTRIES "FLASHMOE_ENTRY(${NAME})\n")
    endforeach()
  endforeach()
  flashmoe_render(${target} "${binary_dir}/all.cu" "${source}")
  configure_file("${source_dir}/entries.inc.in" "${binary_dir}/entries.inc" @ONLY)
endfunction()

# Kernels of the families of products of experts: values of the variables that the family's template
# names, then the suffix of the kernel's name.
#   sm89: of rows of one matrix or of a gate and an up, and which stride of the weights is 1.
#   sm89_few_tokens: products' rows of a step, in sixteens, and its tokens, in eights: for few tokens, for
#     few of a model with many columns, for more.
#   sm90_few_tokens: the same family's for Hopper, by the copy engine.
#   sm90_backward: the gradient of weights.
#   sm90: rows of x, gathered, with a gate and an up or with one matrix, or rows as they lie, also to fp32
#     or added to the output, or rows of dout, back through SiLU; and which stride of the weights is 1, or that
#     a transposed gate and up are interleaved.
set(FLASHMOE_MOE_SM89_KERNELS
  "Rows::kPlain,Major::kColumns," "Rows::kPlain,Major::kRows,_trans"
  "Rows::kGated,Major::kColumns,_gated" "Rows::kGated,Major::kRows,_gated_trans")
set(FLASHMOE_MOE_SM89_FEW_TOKENS_KERNELS "1,1,_r16_n8" "2,1,_r32_n8" "2,2,_r32_n16")
set(FLASHMOE_MOE_SM90_FEW_TOKENS_KERNELS "_bulk")
set(FLASHMOE_MOE_SM90_BACKWARD_KERNELS "_weight_gradient")
set(FLASHMOE_MOE_SM90_KERNELS
  "kPlainGatedUp,kColumns,_swiglu_up" "kNarrowGatedUp,kColumns,_swiglu_up_narrow"
  "kGatedUp,kColumns,_gated_up" "kUp,kColumns,_up" "kDown,kColumns,_down"
  "kShortDown,kColumns,_down_short" "kMiddleDown,kColumns,_down_middle"
  "kWideDown,kColumns,_down_wide"
  "kGatedUp,kRows,_gated_up_trans" "kUp,kRows,_up_trans" "kDown,kRows,_down_trans"
  "kWideDown,kRows,_down_wide_trans"
  "kGatedUp,kRowsInterleaved,_gated_up_interleaved"
  "kUpGradient,kColumns,_up_gradient" "kUpGradient,kRows,_up_gradient_trans")

# Those of a file for each dtype, by family and suffix: those that take long, and one of which the compiler makes
# other code beside another kernel.
set(FLASHMOE_MOE_KERNELS_ALONE
  sm89 sm89_trans sm89_gated sm89_gated_trans sm90_gated_up_interleaved sm90_down_short)

# `per_file`: so many of the others share a file, each in both dtypes. It is called from the first of them
# on. The names of the template's variables follow.
function(flashmoe_instantiate_moe target family per_file)
  set(source_dir "${PROJECT_SOURCE_DIR}/cuda/moe/${family}")
  set(binary_dir "${PROJECT_BINARY_DIR}/generated/cuda/moe/${family}")
  string(TOUPPER "FLASHMOE_MOE_${family}_KERNELS" kernels)
  string(REPLACE "/" "_" kernels "${kernels}")
  flashmoe_read_template(template "${source_dir}")
  set(ENTRIES "")
  set(together "")
  foreach(kernel IN LISTS ${kernels})
    string(REPLACE "," ";" kernel "${kernel}")
    foreach(variable value IN ZIP_LISTS ARGN kernel)
      if(variable)
        set(${variable} "${value}")
      else()
        set(suffix "${value}")
      endif()
    endforeach()
    if(NOT together)
      set(file "${binary_dir}/from_fp16${suffix}.cu")
      set(left ${per_file})
    endif()
    foreach(dtype fp16 bf16)
      if(dtype STREQUAL "fp16")
        set(ELEMENT __half)
      else()
        set(ELEMENT __nv_bfloat16)
      endif()
      set(NAME "${dtype}${suffix}")
      string(APPEND ENTRIES "FLASHMOE_ENTRY(${NAME})\n")
      string(CONFIGURE "${template}" instance @ONLY)
      if("${family}${suffix}" IN_LIST FLASHMOE_MOE_KERNELS_ALONE)
        flashmoe_render(${target} "${binary_dir}/${NAME}.cu" "${instance}")
      else()
        string(APPEND together "${instance}")
      endif()
    endforeach()
    if(NOT "${family}${suffix}" IN_LIST FLASHMOE_MOE_KERNELS_ALONE)
      math(EXPR left "${left} - 1")
      if(left EQUAL 0)
        flashmoe_render(${target} "${file}" "${together}")
        set(together "")
      endif()
    endif()
  endforeach()
  if(together)
    flashmoe_render(${target} "${file}" "${together}")
  endif()
  configure_file("${source_dir}/entries.inc.in" "${binary_dir}/entries.inc" @ONLY)
endfunction()

# Sources of few and small kernels, compiled as one: what each includes costs the compiler more than they do.
function(flashmoe_compile_together target name)
  set(source "")
  foreach(file IN LISTS ARGN)
    string(APPEND source "#include \"cuda/${file}\"\n")
  endforeach()
  flashmoe_render(${target} "${PROJECT_BINARY_DIR}/generated/cuda/${name}.cu" "${source}")
endfunction()
