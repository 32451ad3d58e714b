"""What TTGIR says of a main loop, on a short text that has all of it."""

from __future__ import annotations

from kvcompile.kernels.triton.tools.ttgir import Pipeline, narrow_strides, pipeline

TEXT = """
    %q = tt.load %at : tensor<16x128x!tt.ptr<bf16>, #blocked>
    %k = ttg.local_alloc : () -> !ttg.memdesc<2x64x128xi8, #shared, #smem, mutable> loc(#loc1)
    %v = ttg.local_alloc : () -> !ttg.memdesc<3x64x128xi8, #shared, #smem, mutable> loc(#loc1)
    %first = ttg.async_copy_global_to_local %ptr, %k_0 : tensor<64x128x!tt.ptr<i8>, #b> -> <64x128xi8, #s, #smem>
    %out:2 = scf.for %i = %a to %b step %c iter_args(%x = %y) -> (i32, i32)  : i32 {
      %k_1 = ttg.async_wait %token {num = 4 : i32} loc(#loc2)
      %k_2 = ttg.memdesc_index %k[%i] : !ttg.memdesc<2x64x128xi8, #shared> -> !ttg.memdesc<64x128xi8, #shared>
      %v_2 = ttg.memdesc_index %v[%i] : !ttg.memdesc<3x64x128xi8, #shared> -> !ttg.memdesc<64x128xi8, #shared>
      %scale = tt.load %scales : tensor<64x!tt.ptr<f16>, #slice> loc(#loc3)
      %page = tt.load %pages : !tt.ptr<i32> loc(#loc3)
      %s = tt.dot %q0, %k0, %zero : tensor<16x128xf16> * tensor<128x64xf16> -> tensor<16x64xf32>
      %next = ttg.async_copy_global_to_local %ptr, %k_0 : tensor<64x128x!tt.ptr<i8>, #b> -> <64x128xi8, #s, #smem>
      scf.yield %s, %next : i32, i32
    } loc(#loc4)
    %edges = scf.for %i = %a to %b step %c iter_args(%x = %y) -> (i32)  : i32 {
      %s = tt.dot %q0, %k0, %zero : tensor<16x128xf16> * tensor<128x64xf16> -> tensor<16x64xf32>
      %mask = arith.cmpi slt, %i, %b : i32
      %one = tt.load %scales, %mask : tensor<64x!tt.ptr<f16>, #slice> loc(#loc3)
      %two = tt.load %scales, %mask : tensor<64x!tt.ptr<f16>, #slice> loc(#loc3)
      %a0 = arith.addi %i, %b : i32
      %a1 = arith.addi %i, %b : i32
      %a2 = arith.addi %i, %b : i32
      %a3 = arith.addi %i, %b : i32
      %a4 = arith.addi %i, %b : i32
      scf.yield %s : i32
    } loc(#loc4)
"""


def test_a_pipeline_is_read() -> None:
    """Of the shortest loop with a product; the fewest of the buffers that it uses, and no single numbers."""
    assert pipeline(TEXT) == Pipeline(buffers=2, wait=4, sync_loads=1)


def test_barriers_are_no_buffers() -> None:
    """Products into tensor memory (sm_100) have arrays of them, which may be fewer than tiles."""
    array = """
    %bar = ttg.local_alloc : () -> !ttg.memdesc<1x1xi64, #shared1, #smem, mutable> loc(#loc1)
    %bar_0 = ttg.memdesc_index %bar[%c0] : !ttg.memdesc<1x1xi64, #shared1> -> !ttg.memdesc<1xi64, #shared1>
"""
    ready = "    ttng.init_barrier %bar_0, 1 : !ttg.memdesc<1xi64, #shared1, #smem, mutable> loc(#loc1)\n"
    index = "%bar_1 = ttg.memdesc_index %bar[%i] : !ttg.memdesc<1x1xi64, #shared1> -> !ttg.memdesc<1xi64, #shared1>\n"
    body = TEXT.replace("      %scale = ", "      " + index + "      %scale = ", 1)
    assert pipeline(array + ready + body) == pipeline(TEXT)
    assert pipeline(array + body) == Pipeline(buffers=1, wait=4, sync_loads=1)


def test_one_buffer_that_is_found_before_the_loop() -> None:
    before = """
    %page = ttg.local_alloc : () -> !ttg.memdesc<1x64x32xi16, #shared2, #smem, mutable> loc(#loc1)
    %page_0 = ttg.memdesc_index %page[%c0] : !ttg.memdesc<1x64x32xi16, #shared2> -> !ttg.memdesc<64x32xi16, #shared2>
"""
    copy = "      %next = ttg.async_copy_global_to_local %ptr, "
    body = TEXT.replace(copy + "%k_0", copy + "%page_0")
    assert body != TEXT and pipeline(before + TEXT) == pipeline(TEXT)
    assert pipeline(before + body) == Pipeline(buffers=1, wait=4, sync_loads=1)


def test_what_copies_nothing_has_no_buffers() -> None:
    alone = TEXT.replace("ttg.async_copy_global_to_local", "ttg.local_load").replace(", %k_1", "")
    assert pipeline(alone) == Pipeline(buffers=0, wait=4, sync_loads=1)
    assert pipeline(alone.replace("ttg.async_wait", "ttg.other")) == Pipeline(0, None, 1)
    assert pipeline(TEXT.replace("tt.dot", "arith.addi")) is None
    tensor = TEXT.replace("tt.dot", "ttng.warp_group_dot")
    assert pipeline(tensor) == pipeline(TEXT)


def test_strides_that_are_multiplied_in_32_bits() -> None:
    wide = "%a = arith.extsi %q_s1 : i32 to i64\n%b = arith.muli %a, %batch : i64"
    assert narrow_strides(wide) == ()
    assert narrow_strides("%b = arith.muli %head, %q_s1 : i32") == ("q_s1",)
    splat = "%w = tt.splat %q_s2 : i32 -> tensor<64x1xi32>\n%b = arith.muli %t, %w : tensor<64x1xi32>"
    assert narrow_strides(splat) == ("q_s2",)
