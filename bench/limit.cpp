// The limit of originals_vs_limit: plain libjpeg-turbo over spliced JPEGs, with no resize and no batch around it.
// Decodes the rows and columns that a crop needs and throws the pixels away.
//
//   limit FILE THREADS    FILE: uint32 count, then a record each: uint32 length, int32 x0, y0, x1, y1, the JPEG
//
// Answers as bench/_peers/serve.py does: ready, and then images and seconds for each line `go SECONDS`.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <iterator>
#include <string>
#include <thread>
#include <vector>

#include <jpeglib.h>

#define TEXT_OF(x) #x
#define TEXT(x) TEXT_OF(x)

namespace {

using Clock = std::chrono::steady_clock;

struct Record {
  const uint8_t* data;
  uint32_t length;
  int32_t x0, y0, x1, y1;
};

std::vector<Record> read_records(const std::vector<uint8_t>& bytes) {
  uint32_t count = 0;
  std::memcpy(&count, bytes.data(), sizeof count);
  std::vector<Record> records(count);
  size_t at = sizeof count;
  for (Record& record : records) {
    int32_t head[5];
    std::memcpy(head, bytes.data() + at, sizeof head);
    at += sizeof head;
    record = {bytes.data() + at, static_cast<uint32_t>(head[0]), head[1], head[2], head[3], head[4]};
    at += record.length;
  }
  return records;
}

void decode(jpeg_decompress_struct& info, const Record& record, std::vector<uint8_t>& rows) {
  jpeg_mem_src(&info, record.data, record.length);
  jpeg_read_header(&info, TRUE);
  info.out_color_space = JCS_RGB;
  jpeg_start_decompress(&info);
  // A pixel more on both sides: fancy upsampling takes the window's edge for the image's.
  JDIMENSION left = std::max(0, record.x0 - 1);
  JDIMENSION width = std::min(static_cast<JDIMENSION>(record.x1 + 1), info.output_width) - left;
  if (width < info.output_width) jpeg_crop_scanline(&info, &left, &width);
  if (record.y0 > 0) jpeg_skip_scanlines(&info, record.y0);
  const JDIMENSION band = info.rec_outbuf_height * 8, stride = info.output_width * 3;
  rows.resize(static_cast<size_t>(band) * stride);
  std::vector<JSAMPROW> pointers(band);
  for (JDIMENSION row = 0; row < band; ++row) pointers[row] = rows.data() + static_cast<size_t>(row) * stride;
  while (info.output_scanline < static_cast<JDIMENSION>(record.y1))
    jpeg_read_scanlines(&info, pointers.data(), std::min(band, record.y1 - info.output_scanline));
  jpeg_abort_decompress(&info);
}

// Images until the deadline, each thread taking the next one.
void work(const std::vector<Record>& records, std::atomic<uint64_t>& next, std::atomic<uint64_t>& done,
          Clock::time_point deadline) {
  jpeg_decompress_struct info;
  jpeg_error_mgr errors;
  info.err = jpeg_std_error(&errors);  // a damaged image ends the program: the bench wrote these itself
  jpeg_create_decompress(&info);
  std::vector<uint8_t> rows;
  for (; Clock::now() < deadline; ++done) decode(info, records[next++ % records.size()], rows);
  jpeg_destroy_decompress(&info);
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 3) return 2;
  std::ifstream file(arguments[1], std::ios::binary);
  const std::vector<uint8_t> bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  const std::vector<Record> records = read_records(bytes);
  const int threads = std::atoi(arguments[2]);
  std::cout << "{\"version\": \"libjpeg-turbo " TEXT(LIBJPEG_TURBO_VERSION) "\", \"kernel\": \"none\"}" << std::endl;
  std::atomic<uint64_t> next{0};
  std::string word;
  for (double seconds; std::cin >> word >> seconds;) {
    std::atomic<uint64_t> done{0};
    const Clock::time_point start = Clock::now();
    const auto deadline = start + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
    std::vector<std::thread> team;
    for (int i = 0; i < threads; ++i) team.emplace_back([&] { work(records, next, done, deadline); });
    for (std::thread& member : team) member.join();
    const double taken = std::chrono::duration<double>(Clock::now() - start).count();
    std::cout << "{\"images\": " << done << ", \"seconds\": " << taken << ", \"drained\": 0, \"facts\": {}}" << std::endl;
  }
}
