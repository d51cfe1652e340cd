// Lossless transcoding to baseline with optimised Huffman tables and restart markers.

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include <jerror.h>

#include "libjpeg.h"
#include "reason.h"
#include "transcode.h"

namespace headway {
namespace {

// Width of a restart interval in pixels. Over 250 ImageNet files, against the originals: 48 (24 to 128) gives files of
// 1.012 times the bytes, of which crops need 52 %; 64 (56 to 128) 1.0096 and 53 %; 96 1.008 and 55 %; whole rows 1.001
// and 70 %. What is best for each file alone, under 1.01 for all, would need 52 %.
constexpr int kWidth = 64, kLeast = 56, kMost = 128;

// Real progressive files have ten scans or so; each costs a pass over the whole image, however short it is.
constexpr uint32_t kMaxScans = 100;

// The divisor of the MCU row that is nearest to kWidth pixels; the whole row where none is near.
unsigned interval(unsigned mcus, int mcu_width) {
  unsigned best = mcus;
  int miss = kMost;
  for (unsigned count = 1; count <= mcus && int(count) * mcu_width <= kMost; ++count) {
    const int width = int(count) * mcu_width;
    if (mcus % count == 0 && width >= kLeast && abs(width - kWidth) < miss) {
      best = count;
      miss = abs(width - kWidth);
    }
  }
  return best;
}

// A destination in memory that grows.
struct Grown {
  jpeg_destination_mgr manager;  // first: libjpeg knows this alone
  uint8_t* data;
  size_t capacity, size;
};

Grown& grown_of(j_compress_ptr image) { return *reinterpret_cast<Grown*>(image->dest); }

boolean grow(j_compress_ptr image) {
  Grown& to = grown_of(image);
  const size_t capacity = std::max<size_t>(2 * to.capacity, 1 << 16);
  auto* const data = static_cast<uint8_t*>(realloc(to.data, capacity));
  if (!data) {
    image->err->msg_code = JERR_OUT_OF_MEMORY;
    image->err->error_exit(reinterpret_cast<j_common_ptr>(image));
  }
  to.data = data;
  to.manager.next_output_byte = data + to.capacity;  // libjpeg calls when the buffer is full
  to.manager.free_in_buffer = capacity - to.capacity;
  to.capacity = capacity;
  return TRUE;
}

void begin(j_compress_ptr image) { grow(image); }
void finish(j_compress_ptr image) { grown_of(image).size = grown_of(image).capacity - image->dest->free_in_buffer; }

struct Work {
  Guard guard;
  jpeg_decompress_struct source, copy;
  jpeg_compress_struct target;
  Grown to;
};

// Reads all coefficients; they live as long as the image.
jvirt_barray_ptr* open(Work& work, jpeg_decompress_struct& image, const uint8_t* data, size_t size) {
  jpeg_create_decompress(&image);
  read_from(work.guard, image, data, size, kMaxScans);
  jpeg_save_markers(&image, JPEG_COM, 0xFFFF);
  for (int number = 0; number < 16; ++number) jpeg_save_markers(&image, JPEG_APP0 + number, 0xFFFF);
  jpeg_read_header(&image, TRUE);
  return jpeg_read_coefficients(&image);
}

// Decoders smooth what they show of an unfinished file; a baseline one cannot ask for that.
bool complete(const jpeg_decompress_struct& image) {
  for (int index = 0; index < image.num_components; ++index) {
    if (!image.comp_info[index].quant_table) return false;  // no scan had it
  }
  return finished(image);
}

void write(Work& work, jvirt_barray_ptr* blocks) {
  jpeg_decompress_struct& source = work.source;
  jpeg_compress_struct& target = work.target;
  jpeg_create_compress(&target);
  target.mem->max_memory_to_use = kMaxMemory;
  target.dest = &work.to.manager;
  work.to.manager.init_destination = begin;
  work.to.manager.empty_output_buffer = grow;
  work.to.manager.term_destination = finish;
  jpeg_copy_critical_parameters(&source, &target);
  target.optimize_coding = TRUE;
  target.write_JFIF_header = target.write_Adobe_marker = FALSE;  // they are among the markers kept
  const unsigned across = source.num_components == 1 ? 8 : 8 * unsigned(source.max_h_samp_factor);
  target.restart_interval = interval((source.image_width + across - 1) / across, int(across));
  jpeg_write_coefficients(&target, blocks);
  for (jpeg_saved_marker_ptr marker = source.marker_list; marker; marker = marker->next) {
    jpeg_write_marker(&target, marker->marker, marker->data, marker->data_length);
  }
  jpeg_finish_compress(&target);
}

bool same_markers(const jpeg_decompress_struct& a, const jpeg_decompress_struct& b) {
  jpeg_saved_marker_ptr one = a.marker_list, other = b.marker_list;
  for (; one && other; one = one->next, other = other->next) {
    if (one->marker != other->marker || one->data_length != other->data_length ||
        memcmp(one->data, other->data, one->data_length)) {
      return false;
    }
  }
  return !one && !other;
}

bool same_component(jpeg_decompress_struct& a, jpeg_decompress_struct& b, int index, jvirt_barray_ptr blocks_a,
                    jvirt_barray_ptr blocks_b) {
  const jpeg_component_info &one = a.comp_info[index], &other = b.comp_info[index];
  if (one.component_id != other.component_id || one.h_samp_factor != other.h_samp_factor ||
      one.v_samp_factor != other.v_samp_factor || one.height_in_blocks != other.height_in_blocks ||
      one.width_in_blocks != other.width_in_blocks ||
      memcmp(one.quant_table->quantval, other.quant_table->quantval, sizeof one.quant_table->quantval)) {
    return false;
  }
  for (JDIMENSION row = 0; row < one.height_in_blocks; ++row) {
    const JBLOCKARRAY left = a.mem->access_virt_barray(reinterpret_cast<j_common_ptr>(&a), blocks_a, row, 1, FALSE);
    const JBLOCKARRAY right = b.mem->access_virt_barray(reinterpret_cast<j_common_ptr>(&b), blocks_b, row, 1, FALSE);
    if (memcmp(left[0], right[0], one.width_in_blocks * sizeof(JBLOCK))) return false;
  }
  return true;
}

// Reads back what was written, and compares all that defines the pixels, and the markers.
bool verify(Work& work, jvirt_barray_ptr* blocks) {
  jpeg_decompress_struct &source = work.source, &copy = work.copy;
  jvirt_barray_ptr* const written = open(work, copy, work.to.data, work.to.size);
  if (source.image_width != copy.image_width || source.image_height != copy.image_height ||
      source.num_components != copy.num_components || source.jpeg_color_space != copy.jpeg_color_space ||
      !same_markers(source, copy)) {
    return false;
  }
  for (int index = 0; index < source.num_components; ++index) {
    if (!same_component(source, copy, index, blocks[index], written[index])) return false;
  }
  return true;
}

// Called inside setjmp: holds nothing that has a destructor.
int64_t transcode(Work& work, const uint8_t* data, size_t size, void* out, uint64_t capacity, char* reason) {
  if (size < 2 || data[0] != 0xFF || data[1] != 0xD8) return refuse(reason, "it is not a JPEG");
  jvirt_barray_ptr* const blocks = open(work, work.source, data, size);
  if (!complete(work.source)) return refuse(reason, "its scans are unfinished");
  write(work, blocks);
  if (!verify(work, blocks)) return refuse(reason, "what was written does not read back the same");
  const int64_t written = int64_t(work.to.size);
  if (work.to.size > capacity) return -written;
  memcpy(out, work.to.data, work.to.size);
  return written;
}

// A file that is larger leaves no memory behind.
constexpr uint64_t kKept = 4 << 20;

// As hw_seekable, for what needs no libjpeg; 0: it does.
int64_t transcode_quickly(const uint8_t* data, uint64_t size, void* out, uint64_t capacity) try {
  // Its memory is kept from file to file: to get it anew takes 6 % longer.
  thread_local std::unique_ptr<Transcoder> transcoder;
  Jpeg jpeg;
  if (parse(data, size, jpeg) != Outcome::ok || !jpeg.direct) return 0;
  if (!transcoder) transcoder = make_transcoder();
  const int restart = int(interval(unsigned(jpeg.mcus_per_row), 8 * jpeg.h_max));
  const uint8_t* written;
  size_t count = 0;
  const bool done = transcoder->run(jpeg, data, size, restart, written, count) == Outcome::ok;
  if (done && count <= capacity) memcpy(out, written, count);
  if (size > kKept) transcoder.reset();
  return !done ? 0 : count <= capacity ? int64_t(count) : -int64_t(count);
} catch (const std::bad_alloc&) {
  return 0;
}

}  // namespace
}  // namespace headway

int64_t hw_seekable(const void* data, uint64_t length, uint8_t* sound, void* out, uint64_t capacity, char* reason) {
  using namespace headway;
  if (!data || (!out && capacity)) return refuse(reason, "there is no memory to read or to write");
  const int64_t quick = transcode_quickly(static_cast<const uint8_t*>(data), length, out, capacity);
  if (sound) *sound = quick != 0;
  if (quick) return quick;
  auto* const work = static_cast<Work*>(calloc(1, sizeof(Work)));
  if (!work) return refuse(reason, "out of memory");
  work->guard.strict = true;  // a damaged file is kept as it is, for others to judge
  jpeg_common_struct* const images[] = {reinterpret_cast<j_common_ptr>(&work->source),
                                        reinterpret_cast<j_common_ptr>(&work->copy),
                                        reinterpret_cast<j_common_ptr>(&work->target)};
  for (jpeg_common_struct* image : images) watch(work->guard, *image);
  int64_t result;
  if (setjmp(work->guard.jump)) {
    char message[JMSG_LENGTH_MAX];
    work->guard.errors.format_message(images[0], message);
    const bool too_large = work->guard.errors.msg_code == JERR_NO_BACKING_STORE;
    result = too_large ? refuse(reason, "its coefficients take more than %ld MiB", kMaxMemory >> 20)
                       : refuse(reason, "%s", message);
  } else {
    result = transcode(*work, static_cast<const uint8_t*>(data), length, out, capacity, reason);
  }
  for (jpeg_common_struct* image : images) jpeg_destroy(image);
  free(work->to.data);
  free(work);
  return result;
}
