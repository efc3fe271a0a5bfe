/* For a build with FLASHMOE_MANYLINUX, before every C++ source: functions of libm that glibc 2.29
 * gave a new version, by their old one, which differs in how it sets errno. A library of these
 * names, as for libpthread, would take the place of libm. */
__asm__(".symver exp, exp@GLIBC_2.2.5");
__asm__(".symver exp2, exp2@GLIBC_2.2.5");
__asm__(".symver log, log@GLIBC_2.2.5");
__asm__(".symver log2, log2@GLIBC_2.2.5");
__asm__(".symver pow, pow@GLIBC_2.2.5");
